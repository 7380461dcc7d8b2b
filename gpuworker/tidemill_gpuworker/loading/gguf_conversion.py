"""Turn a GGUF file into a Hugging Face directory, in a process of its own.

That process alone imports transformers' loaders, and gives their memory back when it ends.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import ModelError
from tidemill_gpuworker.demo.demo_interrupt import child
from tidemill_gpuworker.loading.gguf_gemma import scale_queries
from tidemill_gpuworker.loading.gguf_rope import rope_scaling, rotated_share
from tidemill_gpuworker.loading.gguf_tensors import known_tensors, unused_tensors

_ARCHITECTURE_FIELD = "general.architecture"
_CHAT_TEMPLATE_FIELD = "tokenizer.chat_template"
_PRE_TOKENIZER_FIELD = "tokenizer.ggml.pre"

#: The source is a local file, so nothing may ask a hub; progress is the caller's to show.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "passive"}


def convert(gguf: Path, out: Path) -> None:
    """Write ``gguf`` to the existing directory ``out``: bf16 safetensors, tokenizer, template.

    Raises ``ModelError`` with the reason if it cannot be done.
    """
    module = "tidemill_gpuworker.loading.gguf_conversion"
    command = [sys.executable, "-m", module, str(gguf), str(out)]
    status, said = _run(command)
    if status:
        lines = said.strip().splitlines()
        raise ModelError(
            f"{gguf.name} could not be converted: {lines[-1] if lines else status}",
            fix="Check that the packages of tidemill[worker] are installed, and that transformers"
            " reads GGUF files of this architecture; or give the model as safetensors.",
        )


def _run(command: list[str]) -> tuple[int, str]:
    with child(
        command,
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        said = str(process.communicate()[1])
    return int(process.returncode), said


def _convert_here(gguf: Path, out: Path) -> None:
    # Imported here so that the parent process never pays for it.
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    tokenizer = _load_tokenizer(gguf, reader)
    model = _load_weights(gguf, reader)
    _stretch(model.config, reader)
    scale_queries(model.config)
    _agree_on_special_tokens(model, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _load_weights(gguf: Path, reader: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if info["missing_keys"]:
        # transformers goes on, with random numbers in their place.
        sys.exit(f"the file does not hold {min(info['missing_keys'])}")
    _check_that_all_are_used(model, reader, info["unexpected_keys"])
    return model


def _check_that_all_are_used(model: Any, reader: Any, left_over: set[str]) -> None:
    known = known_tensors(model, _contents(reader, _ARCHITECTURE_FIELD))
    if known is None:
        unused = unused_tensors(left_over, ())
    else:
        unused = unused_tensors([tensor.name for tensor in reader.tensors], known)
    if unused:
        # transformers goes on without them.
        sys.exit(f"the file holds {unused[0]}, which transformers' model has no place for")


def _stretch(config: Any, reader: Any) -> None:
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}

    def field(name: str) -> Any:
        return _contents(reader, name)

    settings = rope_scaling(field, tensors.get) | rotated_share(field)
    if settings:
        # Families whose layers differ have settings for each kind, and stretch those of full ones.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(settings)
    original = settings.get("original_max_position_embeddings")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original


def _load_tokenizer(gguf: Path, reader: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _contents(reader, _PRE_TOKENIZER_FIELD) == "smollm":
        _split_digits(tokenizer.backend_tokenizer)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _contents(reader, _CHAT_TEMPLATE_FIELD)
    for loading_option in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(loading_option, None)
    return tokenizer


def _contents(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _split_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers as pre

    # "smollm" means: digits stand alone, then GPT-2's byte level. The GGUF loader knows the second
    # half only, which shows where several spaces precede a digit.
    backend.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )


def _agree_on_special_tokens(model: Any, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, token_id in ids.items():
        setattr(model.config, name, token_id)
    model.config.name_or_path = ""
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    limit = getattr(model.config, "max_position_embeddings", None)
    tokenizer.model_max_length = limit or tokenizer.model_max_length


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
