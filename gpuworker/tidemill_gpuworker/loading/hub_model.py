"""A model of a Hugging Face hub, downloaded into the cache that all its clients share."""

from pathlib import Path

from tidemill.protocol.errors import ModelNotFound, TidemillError
from tidemill.service.model_name import HubName

#: Weights that cannot run code, and what describes them; never pickles.
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")
#: The same weights in the forms of other programs.
_UNWANTED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "*.msgpack")
_ELSEWHERE = "Give a model directory, or set HF_HOME to a cache that has the model."


def hub_model_dir(name: HubName) -> Path:
    """Return the directory of a model, downloading what is not there yet.

    Address, token, cache and being offline are as ``huggingface_hub`` reads them from HF_ENDPOINT,
    HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.  Where the hub cannot be reached, a model that was
    downloaded before is served.

    Raises:
        ModelNotFound: the hub has no such model or revision, does not give it, or is not reached.
    """
    # Imported here: a model that is a directory needs none of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except HfHubHTTPError as error:
        raise _refused(name, error) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"the model {_told(name)} is not in the local cache and the hub gives no answer"
            f" ({_first_line(error.__cause__ or error)})",
            fix=_ELSEWHERE,
        ) from error
    except OSError as error:
        raise ModelNotFound(
            f"the model {_told(name)} cannot be downloaded: {error}", fix=_ELSEWHERE
        ) from error
    if not (Path(found) / "config.json").is_file():
        raise ModelNotFound(
            f"{_told(name)} has no config.json on the hub: it is no model with safetensors",
            fix="Of a repository of GGUF files download one, and give its path.",
        )
    return Path(found)


def _refused(name: HubName, error: Exception) -> TidemillError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(
            f"the hub has no revision {name.revision} of {name.repository}",
            fix="Check what stands behind the @.",
        )
    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"the hub gives {name.repository} only to those who were granted it",
            fix="Accept its terms on the hub and set HF_TOKEN.",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"there is no directory {_told(name)}, and the hub has no such model",
            fix="Check the name; for a private model set HF_TOKEN.",
        )
    return ModelNotFound(f"the model {_told(name)} cannot be downloaded: {error}", fix=_ELSEWHERE)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _told(name: HubName) -> str:
    return name.repository if name.revision is None else f"{name.repository}@{name.revision}"
