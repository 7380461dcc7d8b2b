"""Models that run on transformers with our attention, against transformers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.fake_engine import make_seq
from support.golden_models import (
    GOLDEN,
    NATIVE_ALONE,
    WINDOW,
    make_golden_model,
    save_golden_model,
)
from support.golden_runs import check_run, make_prompts
from support.greedy import generate_greedily, reference_outputs
from support.tiny_tokenizers import byte_level_tokenizer
from support.transformers_models import CASES, REFUSED, make_config, save_case
from tidemill.protocol.errors import DamagedModel, ModelNotFound, UnsafeModel, UnsupportedModel
from tidemill.service.config import load_config
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_choice import NativeSource, choose_model
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.options.worker_config import ModelImpl, WorkerConfig
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.transformers_backend import attention, model
from tidemill_gpuworker.transformers_backend.masks import window_of

IN_CHUNKS = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)
#: Learned positions; two kinds of layers and scaled logits; values narrower than keys and experts.
FAST = ("opt", "cohere2", "deepseek v3")


def make_runner(model_dir: Path, num_blocks: int = 128, block_size: int = 16) -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype="float32",
        block_size=block_size,
        num_blocks=num_blocks,
        num_threads=2,
        source=choose_model(model_dir, "transformers"),
    )


def check_chunks(name: str, reference: transformers.PreTrainedModel, model_dir: Path) -> None:
    # The first one is alone in a step, and longer than it.
    prompts = make_prompts((2 * WINDOW + 7, 3, 21), shared=WINDOW + 9)
    run = generate_greedily(make_runner(model_dir), prompts, 5, IN_CHUNKS)
    assert run.num_chunked > run.num_silent > 0
    assert run.num_hit_tokens > 0
    assert run.largest_batch > 1
    print(f"{name}: largest difference of logits {check_run(reference, prompts, run):.1e}")


@pytest.mark.parametrize("name", FAST)
def test_chunks_and_prefix_hits_give_the_logits_and_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    check_chunks(name, save_case(CASES[name], tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(FAST)))
def test_every_other_architecture_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    check_chunks(name, save_case(CASES[name], tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", CASES)
def test_batches_of_mixed_lengths_generate_what_transformers_does(
    name: str, block_size: int, tmp_path: Path
) -> None:
    reference = save_case(CASES[name], tmp_path)
    prompts = make_prompts((1, 2, 15, 16, 17, 33, 64, 65, 97), shared=70)
    runner = make_runner(tmp_path, 2048 // block_size, block_size)
    expected = reference_outputs(reference, prompts, 8)
    for num_seqs, budget in ((1, 256), (16, 48)):
        config = StepConfig(max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=num_seqs)
        run = generate_greedily(runner, prompts, 8, config)
        assert run.outputs == expected
        check_run(reference, prompts, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "gpt2", "cohere2", "olmoe", "deepseek v2"])
def test_preempted_sequences_generate_the_same_tokens(name: str, tmp_path: Path) -> None:
    reference = save_case(CASES[name], tmp_path)
    runner = make_runner(tmp_path, num_blocks=14)
    prompts = make_prompts((40, 50, 60, 70, 80), shared=20)
    config = StepConfig(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=8)
    run = generate_greedily(runner, prompts, 24, config)
    assert run.num_preemptions > 0
    check_run(reference, prompts, run)


def make_config_of_worker(model_dir: Path, model_impl: ModelImpl) -> WorkerConfig:
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    return WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        model_impl=model_impl,
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=32,
    )


def test_a_worker_generates_with_it(tmp_path: Path) -> None:
    reference = save_case(CASES["opt"], tmp_path)
    served = load_model(make_config_of_worker(tmp_path, "auto"))
    assert served.card.max_model_len == 512
    seq = make_seq([5, 300, 7], 6)
    served.engine.add(seq)
    while served.engine.has_work:
        served.engine.step()
    assert seq.output_ids == reference_outputs(reference, [[5, 300, 7]], 6)[0]


def test_a_worker_heeds_the_wish_for_our_own_layers(tmp_path: Path) -> None:
    save_case(CASES["opt"], tmp_path)
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM is not supported"):
        load_model(make_config_of_worker(tmp_path, "native"))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_native_families_run_on_transformers_alike(name: str, tmp_path: Path) -> None:
    model_dir = save_golden_model(make_golden_model(name), tmp_path)
    prompts = make_prompts((3, 21, 2 * WINDOW + 7), shared=WINDOW + 9)
    native = ModelRunner(model_dir, dtype="float32", num_blocks=128, num_threads=2)
    assert isinstance(choose_model(model_dir), NativeSource)
    ours = generate_greedily(native, prompts, 5, IN_CHUNKS)
    theirs = generate_greedily(make_runner(model_dir), prompts, 5, IN_CHUNKS)
    assert theirs.outputs == ours.outputs
    for logits, expected in zip(theirs.logits, ours.logits, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"phi3 longrope long", *NATIVE_ALONE}))
def test_every_native_family_runs_on_transformers_too(name: str, tmp_path: Path) -> None:
    reference = make_golden_model(name)
    check_chunks(name, reference, save_golden_model(reference, tmp_path))


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_gives_the_tokens_of_its_native_family(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_dir)
    texts = ("The capital of France is", "Once upon a time, in a village by the sea,", "1, 1, 2, 3")
    prompts = [tokenizer.encode(text) for text in texts]
    config = StepConfig(max_model_len=512, max_num_batched_tokens=12, max_num_seqs=3)
    outputs = [
        generate_greedily(
            ModelRunner(demo_model_dir, dtype="float32", num_blocks=32, source=source),
            prompts,
            12,
            config,
        ).outputs
        for source in (choose_model(demo_model_dir), choose_model(demo_model_dir, "transformers"))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_over_a_paged_cache_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    case, named = REFUSED[name]
    make_config(case).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        choose_model(tmp_path, "transformers")
    assert case.model_class in caught.value.one_line()
    assert named in caught.value.one_line()
    assert caught.value.fix


@pytest.mark.parametrize(("name", "field"), [("opt", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_more_layers_than_any_model_has_are_damage(name: str, field: str, tmp_path: Path) -> None:
    make_config(CASES[name]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 2**31 - 1}))
    with pytest.raises(DamagedModel, match=rf"{field} must be an integer from 1 to 1024"):
        choose_model(tmp_path)


def test_long_rotary_factors_are_never_mixed_with_short_ones(tmp_path: Path) -> None:
    model_dir = save_golden_model(make_golden_model("phi3 longrope short"), tmp_path)
    assert choose_model(model_dir, "transformers").model_config.max_model_len == 256


def without_soft_cap(*tensors: Any, softcap: float | None = None, **options: Any) -> Any:
    return attention.paged_attention_forward(*tensors, **options)


def test_an_option_of_attention_that_goes_unheeded_is_found_before_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_golden_model(make_golden_model("gemma2"), tmp_path)
    register = transformers.AttentionInterface.register
    monkeypatch.setattr(
        model, "register", lambda: register(attention.ATTENTION_NAME, without_soft_cap)
    )
    with pytest.raises(UnsupportedModel, match="logits differ from transformers' own"):
        make_runner(tmp_path)


def test_only_native_models_are_quantised_while_they_are_loaded(opt_dir: Path) -> None:
    source = choose_model(opt_dir, "transformers")
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM cannot be quantised"):
        ModelRunner(opt_dir, num_blocks=8, source=source, quantization="int8")


@pytest.fixture
def opt_dir(tmp_path: Path) -> Path:
    save_case(CASES["opt"], tmp_path)
    return tmp_path


def test_a_missing_tensor_is_named(opt_dir: Path) -> None:
    tensors = load_file(opt_dir / "model.safetensors")
    name = "model.decoder.layers.1.fc1.bias"
    del tensors[name]
    save_file(tensors, opt_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedModel, match=rf"{name} is missing"):
        make_runner(opt_dir)


def test_a_tensor_without_a_place_is_named(opt_dir: Path) -> None:
    tensors = load_file(opt_dir / "model.safetensors")
    name = "model.decoder.layers.2.fc1.bias"
    tensors[name] = torch.zeros(96)
    save_file(tensors, opt_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedModel, match=rf"{name} has no place"):
        make_runner(opt_dir)


def test_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save_case(CASES["gpt2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    make_runner(tmp_path)


def test_a_tensor_of_another_shape_is_refused(opt_dir: Path) -> None:
    tensors = load_file(opt_dir / "model.safetensors")
    tensors["model.decoder.layers.1.fc1.bias"] = torch.zeros(95)
    save_file(tensors, opt_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedModel, match=r"layers\.1\.fc1\.bias has another shape"):
        make_runner(opt_dir)


def test_pickles_are_never_loaded(opt_dir: Path) -> None:
    (opt_dir / "model.safetensors").rename(opt_dir / "pytorch_model.bin")
    with pytest.raises(UnsafeModel, match="pickle"):
        make_runner(opt_dir)


def test_a_model_without_weights_is_refused(opt_dir: Path) -> None:
    (opt_dir / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        make_runner(opt_dir)


def test_code_of_the_model_is_never_run(opt_dir: Path) -> None:
    path = opt_dir / "config.json"
    path.write_text(path.read_text().replace("{", '{"auto_map": {"AutoConfig": "own.Config"},', 1))
    with pytest.raises(UnsafeModel, match="auto_map"):
        choose_model(opt_dir)


def causal(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_masks_are_told_apart() -> None:
    assert window_of(causal, 100) == 0
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 7), 100) == 7
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 100), 100) == 0
    assert window_of(lambda b, h, q, k: (k <= q) & (k // 32 == q // 32), 100) is None
    assert window_of(lambda b, h, q, k: k >= 0, 100) is None
    assert window_of(lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k == 0)), 100) is None
