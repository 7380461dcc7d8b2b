"""Loads a model for speech and builds the engine that serves it."""

from collections.abc import Callable

import torch

from tidemill.protocol.messages import ModelCard
from tidemill.protocol.step_cost import StepFeatures
from tidemill.service.job_inputs import TOKENS_PER_WINDOW
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.pooling.setup import choose_device, pooling_dtype, stateless_info
from tidemill_gpuworker.speech.engine import SpeechEngine
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.stored_audio import AudioSource
from tidemill_gpuworker.speech.vocabulary import read_vocabulary
from tidemill_gpuworker.speech.work import SpeechWork


def load_speech_model(config: WorkerConfig, on_step: Callable[[StepFeatures], None]) -> ServedModel:
    """Load the model; its engine will tell ``on_step`` of each step.

    Raises ``ModelError`` if the directory cannot be served, ``ConfigError`` if a setting does not
    fit the device.
    """
    device = choose_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = Tokenizer.from_directory(config.model_dir)
    vocabulary = read_vocabulary(config.model_dir, tokenizer)
    model = SpeechModel(config.model_dir, device=device, dtype=pooling_dtype(config.dtype, device))
    source = AudioSource.of(config.service)
    card = ModelCard(
        name=config.served_model_name,
        revision=model.revision,
        tokenizer_digest=tokenizer.digest,
        max_model_len=model.max_tokens,
        vocab_size=int(model.config.vocab_size),
        block_size=config.block_size,
        task="transcribe",
        blob_store=source.identity,
    )
    budget = max(config.max_num_batched_tokens or 0, 4 * TOKENS_PER_WINDOW)
    return ServedModel(
        engine=SpeechEngine(model, vocabulary, tokenizer, config.max_num_seqs, on_step=on_step),
        tokenizer=tokenizer,
        card=card,
        info=stateless_info(config, budget),
        kinds=SpeechWork(card, model, vocabulary, tokenizer, source),
    )
