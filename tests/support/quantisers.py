"""Quantisers of small weights, one a format: the tensors it stores and the weight they stand for.

Written from the formats' descriptions with numpy and whole numbers, apart from the code that reads
them. A quantiser takes a float32 weight [out, in] of multiples of 8.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
#: Quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantised:
    """What is written for a layer, by suffix, and the float32 weight that it stands for."""

    tensors: Tensors
    plain: torch.Tensor


Quantiser = Callable[[torch.Tensor], Quantised]


def pack(codes: np.ndarray, bits: int, places: Sequence[int] | None = None) -> torch.Tensor:
    """Pack the last dimension into int32; field j of a word holds number ``places[j]`` of it."""
    per_word = 32 // bits
    fields = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, per_word)
    words = np.zeros(fields.shape[:-1], np.uint64)
    for field, place in enumerate(places or range(per_word)):
        words += fields[..., place] * np.uint64(1 << (bits * field))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


@dataclass(frozen=True)
class _Affine:
    codes: np.ndarray  # [out, in]
    zeros: np.ndarray  # [out, groups]
    scales: np.ndarray  # [out, groups], float16 values
    plain: np.ndarray


def _affine(
    weight: np.ndarray, group_of: np.ndarray, bits: int, *, symmetric: bool, least_zero: int = 0
) -> _Affine:
    """Round each group of columns to whole steps from its least to its largest value."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    count = int(group_of.max()) + 1
    codes = np.zeros(weight.shape, np.int64)
    zeros, scales = np.zeros((len(weight), count), np.int64), np.zeros((len(weight), count))
    plain = np.zeros(weight.shape)
    for group in range(count):
        columns = np.flatnonzero(group_of == group)
        part = weight[:, columns].astype(np.float64)
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scale = np.maximum(-low, high) / (middle - 1)
            zero = np.full(len(part), middle)
        else:
            scale = (high - low) / top
            zero = np.clip(np.rint(-low / scale), least_zero, top).astype(np.int64)
        scale = scale.astype(np.float16).astype(np.float64)
        code = np.clip(np.rint(part / scale[:, None]) + zero[:, None], 0, top).astype(np.int64)
        codes[:, columns], zeros[:, group], scales[:, group] = code, zero, scale
        plain[:, columns] = (code - zero[:, None]) * scale[:, None]
    return _Affine(codes, zeros, scales, plain)


def _float32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _half(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float16))


def gptq(
    bits: int, group_size: int, *, symmetric: bool, act_order: bool = False, version: int = 1
) -> Quantiser:
    """GPTQ: words along the inputs; version 1 stores zeros less one."""

    def quantise(weight: torch.Tensor) -> Quantised:
        inputs = weight.shape[1]
        size = inputs if group_size == -1 else group_size
        group_of = np.arange(inputs) // size
        if act_order:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        found = _affine(weight.numpy(), group_of, bits, symmetric=symmetric, least_zero=1)
        less = 1 if version == 1 else 0
        tensors = {
            "qweight": pack(found.codes, bits).T.contiguous(),
            "qzeros": pack(found.zeros.T - less, bits),
            "scales": _half(found.scales.T),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return Quantised(tensors, _float32(found.plain))

    return quantise


def awq(group_size: int) -> Quantiser:
    """AWQ, GEMM version: words along the outputs, interleaved."""

    def quantise(weight: torch.Tensor) -> Quantised:
        group_of = np.arange(weight.shape[1]) // group_size
        found = _affine(weight.numpy(), group_of, 4, symmetric=False)
        tensors = {
            "qweight": pack(found.codes.T, 4, AWQ_COLUMNS),
            "qzeros": pack(found.zeros.T, 4, AWQ_COLUMNS),
            "scales": _half(found.scales.T),
        }
        return Quantised(tensors, _float32(found.plain))

    return quantise


def pack_quantized(bits: int, group_size: int, *, symmetric: bool, act_order: bool) -> Quantiser:
    """compressed-tensors' integers: words along the inputs, zeros along the outputs."""

    def quantise(weight: torch.Tensor) -> Quantised:
        inputs = weight.shape[1]
        group_of = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        if act_order:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        found = _affine(weight.numpy(), group_of, bits, symmetric=symmetric)
        tensors = {
            "weight_packed": pack(found.codes, bits),
            "weight_scale": _half(found.scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(found.zeros.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return Quantised(tensors, _float32(found.plain))

    return quantise


def fp8_rows(scale_name: str = "weight_scale", *, per_tensor: bool, static: bool) -> Quantiser:
    """fp8 with one scale, or one a row; static ones also scale the activations."""

    def quantise(weight: torch.Tensor) -> Quantised:
        largest = weight.abs().max() if per_tensor else weight.abs().amax(1, keepdim=True)
        scale = (largest / 448).float()
        codes = (weight / scale).clamp(-448, 448).to(FP8)
        tensors = {"weight": codes, scale_name: scale}
        if static:
            tensors["input_scale"] = torch.tensor(0.01)
        return Quantised(tensors, codes.float() * scale)

    return quantise


def fp8_blocks(scale_name: str, block: int = 128) -> Quantiser:
    """fp8 with a scale for each square block; blocks at the edges may be smaller."""

    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = (-(-size // block) for size in weight.shape)
        codes, plain = torch.zeros_like(weight).to(FP8), torch.zeros_like(weight)
        scales = torch.zeros(rows, columns)
        for i in range(rows):
            for j in range(columns):
                place = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
                scales[i, j] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scales[i, j]).clamp(-448, 448).to(FP8)
                plain[place] = codes[place].float() * scales[i, j]
        return Quantised({"weight": codes, scale_name: scales}, plain)

    return quantise


def int8_rows(weight: torch.Tensor) -> Quantised:
    """compressed-tensors' int8 with a scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return Quantised({"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def bitsandbytes_int8(weight: torch.Tensor) -> Quantised:
    """LLM.int8 of bitsandbytes."""
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest)[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Quantised(tensors, codes.double().mul(largest[:, None].double() / 127).float())


def bitsandbytes_nf4(*, nested: bool) -> Quantiser:
    """Four bits of bitsandbytes in blocks of 64; nested quantises the scales as well."""

    def quantise(weight: torch.Tensor) -> Quantised:
        table = torch.tensor(NF4)
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, object] = {
            "quant_type": "nf4",
            "blocksize": 64,
            "shape": list(weight.shape),
        }
        state["dtype"] = "float32"
        tensors: Tensors = {}
        if nested:
            absmax = _nest(absmax, tensors, state)
        else:
            tensors["weight.absmax"] = absmax
        codes = ((blocks / absmax[:, None])[:, :, None] - table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        tensors["weight"] = (flat[::2] * 16 + flat[1::2])[:, None]
        tensors["weight.quant_map"] = table
        raw = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(raw), dtype=torch.uint8)
        return Quantised(tensors, (table[codes] * absmax[:, None]).view(weight.shape))

    return quantise


def _nest(absmax: torch.Tensor, tensors: Tensors, state: dict[str, object]) -> torch.Tensor:
    offset = float(absmax.mean())
    values = torch.linspace(-1, 1, 256)
    parts = [*(absmax - offset).split(256)]
    largest = torch.stack([part.abs().max() for part in parts])
    scaled = torch.cat([part / top for part, top in zip(parts, largest, strict=True)])
    codes = (scaled[:, None] - values).abs().argmin(1)
    tensors["weight.absmax"] = codes.to(torch.uint8)
    tensors["weight.nested_absmax"] = largest
    tensors["weight.nested_quant_map"] = values
    state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    per_code = torch.cat([top.expand(len(p)) for p, top in zip(parts, largest, strict=True)])
    return values[codes] * per_code + offset


def float4(group_size: int, *, nvidia: bool) -> Quantiser:
    """NVFP4 (scales in fp8 over a global one) or MXFP4 (scales are powers of two)."""

    def quantise(weight: torch.Tensor) -> Quantised:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)])
        groups = weight.reshape(len(weight), -1, group_size)
        wanted = groups.abs().amax(2) / 6
        tensors: Tensors = {}
        if nvidia:
            whole = (448 / wanted.max()).reshape(1)
            stored = (wanted * whole).to(FP8)
            tensors["weight_global_scale"] = whole
            scales = stored.float() / whole
        else:
            exponents = wanted.log2().ceil()
            stored, scales = (exponents + 127).to(torch.uint8), 2.0**exponents
        codes = ((groups / scales[:, :, None])[..., None] - table).abs().argmin(-1)
        flat = codes.view(len(weight), -1).to(torch.uint8)
        tensors |= {"weight_packed": flat[:, ::2] + 16 * flat[:, 1::2], "weight_scale": stored}
        return Quantised(tensors, (table[codes] * scales[:, :, None]).view(weight.shape))

    return quantise


def squeezellm(*, sparse: bool) -> Quantiser:
    """A table of quantiles for each row; the largest weights of each row apart."""

    def quantise(weight: torch.Tensor) -> Quantised:
        table = torch.quantile(weight, torch.linspace(0.02, 0.98, 16), dim=1).T.contiguous()
        codes = (weight[:, :, None] - table[:, None, :]).abs().argmin(-1)
        plain = table.gather(1, codes)
        tensors = {"qweight": pack(codes.numpy(), 4).T.contiguous(), "lookup_table": table}
        if sparse:
            outliers = torch.where((weight - plain).abs() > 0.05, weight - plain, 0.0)
            rows, columns = outliers.nonzero(as_tuple=True)
            assert len(rows) > 0
            ends = [0, *np.cumsum(np.bincount(rows.numpy(), minlength=len(weight))).tolist()]
            tensors["rows"] = torch.tensor(ends, dtype=torch.int32)
            tensors["cols"], tensors["vals"] = columns.int(), outliers[rows, columns]
            plain = plain + outliers
        return Quantised(tensors, plain)

    return quantise
