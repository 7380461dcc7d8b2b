"""``/v1/models``: what is served."""

from collections.abc import Iterator

from fastapi import APIRouter

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.openai_models.models import Model, ModelList
from tidemill.protocol.errors import UnknownModel
from tidemill.protocol.messages import ModelCard

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(call: CurrentCall) -> ModelList:
    """List the models, and behind each its adapters."""
    cards = await call.producer.models()
    created = call.state.started_at
    return ModelList(data=[model for card in cards for model in models_of(card, created)])


@router.get("/v1/models/{name:path}")
async def get_model(call: CurrentCall, name: str) -> Model:
    """Describe one model or adapter."""
    card = await call.producer.model(name)
    for model in models_of(card, call.state.started_at):
        if model.id == name:
            return model
    raise UnknownModel(f"model: there is no model {name[:256]!r}", field="model")


def models_of(card: ModelCard, created: int) -> Iterator[Model]:
    """Yield a model and its adapters."""

    def entry(name: str, parent: str | None) -> Model:
        return Model(
            id=name,
            created=created,
            root=card.name,
            parent=parent,
            max_model_len=card.max_model_len,
            task=card.task,
        )

    yield entry(card.name, None)
    for adapter in card.adapters:
        yield entry(adapter.name, card.name)
