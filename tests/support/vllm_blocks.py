"""Random block operations, played on our BlockManager and on vLLM's KVCacheManager side by side.

The operations: ``add`` a sequence, ``admit`` it with what is cached of it and blocks for a chunk,
``advance`` it by known tokens, ``append`` a generated token, ``preempt`` it and ``finish`` it.
Both sides answer each of them, and the answers must be equal: block hashes, tokens that were
found, whether there was room, how many blocks are free.
"""

import json
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from support.fake_engine import make_seq
from tidemill.protocol.prefix import hash_blocks
from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager

ROOT = Path(__file__).parents[2]
VENV_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SERVER = ROOT / "scripts" / "vllm_blocks.py"

Answer = dict[str, Any]


class OurBlocks:
    """Our side: each operation is a step of its own."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool, priority: PriorityClass
    ) -> None:
        self._manager = BlockManager(
            num_blocks, block_size, watermark=0.0, enable_prefix_caching=caching
        )
        self._caching = caching
        self._priority = priority
        self.seqs: dict[str, Sequence] = {}

    def add(self, seq_id: str, tokens: list[int], salt: str | None) -> Answer:
        """Take in a sequence; tell its block hashes."""
        seq = make_seq(tokens, seq_id=seq_id, priority=int(self._priority), salt=salt)
        self.seqs[seq_id] = seq
        return {"hashes": self._hashes(seq)}

    @property
    def num_evictions(self) -> int:
        """How often a cached block made room for another one."""
        return self._manager.num_evictions

    def admit(self, seq_id: str, chunk: int) -> Answer:
        """Look its prefix up, and give it blocks for a chunk if all of it would fit."""
        seq = self.seqs[seq_id]
        prefix = self._manager.find_prefix(seq)
        num_cached = len(prefix) * self._manager.block_size
        is_admitted = self._manager.can_admit(seq, prefix)
        if is_admitted:
            self._manager.adopt_prefix(seq, prefix)
            seq.num_computed_tokens = num_cached
            assert self._allocate(seq, min(chunk, seq.num_uncomputed_tokens))
        return {"cached": num_cached, "ok": is_admitted, "free": self._manager.num_free_blocks}

    def advance(self, seq_id: str, count: int) -> Answer:
        """Give it blocks for its next tokens."""
        is_given = self._allocate(self.seqs[seq_id], count)
        return {"ok": is_given, "free": self._manager.num_free_blocks}

    def append(self, seq_id: str, token: int) -> Answer:
        """Give it a token of output; tell its last block hash."""
        seq = self.seqs[seq_id]
        seq.output_ids.append(token)
        return {"count": seq.num_tokens, "hash": (self._hashes(seq) or [""])[-1]}

    def preempt(self, seq_id: str) -> Answer:
        """Take its blocks away; it will come back."""
        seq = self.seqs[seq_id]
        self._manager.preempt(seq)
        seq.num_computed_tokens = 0
        return {"free": self._manager.num_free_blocks}

    def finish(self, seq_id: str) -> Answer:
        """Take its blocks away for good."""
        self._manager.free(self.seqs.pop(seq_id))
        return {"free": self._manager.num_free_blocks}

    def _allocate(self, seq: Sequence, count: int) -> bool:
        is_given = self._manager.allocate(seq, count)
        if is_given:
            seq.num_computed_tokens += count
            self._manager.commit_step()
        return is_given

    def _hashes(self, seq: Sequence) -> list[str]:
        if not self._caching:
            return []
        tokens = seq.token_slice(0, seq.num_tokens)
        hashes = hash_blocks(tokens, self._manager.block_size, seq.extra_keys)
        return [block_hash.hex() for block_hash in hashes]


class VllmProcess:
    """vLLM's side, in a process of its own; a context manager."""

    def __init__(self, python: Path = VENV_PYTHON) -> None:
        self._process = subprocess.Popen(
            [python, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        # Its input ends, and so does it.
        self._process.communicate(timeout=30)

    def ask(self, name: str, *arguments: object) -> Answer:
        """Have an operation done; returns the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"vLLM's side ended at {name}{arguments}; its standard error says why"
        return json.loads(line)  # type: ignore[no-any-return]


class Comparison:
    """Draws operations, has both sides do them and asserts that they answer the same.

    Prompts often begin like an earlier one, of whoever has ended, waits or runs, so that prefixes
    are found, shared, evicted and computed twice.
    """

    def __init__(
        self,
        vllm: VllmProcess,
        *,
        num_blocks: int,
        block_size: int,
        caching: bool = True,
        priority: PriorityClass = PriorityClass.STANDARD,
        seed: int,
    ) -> None:
        vllm.ask("start", num_blocks, block_size, caching)
        self._vllm = vllm
        self._ours = OurBlocks(num_blocks, block_size, caching, priority)
        self._chance = random.Random(seed)
        self._longest = num_blocks * block_size
        # So long that a few fill the cache.
        self._most = max(40, self._longest // 6)
        self._running: list[str] = []
        self._waiting: list[str] = []
        self._prompts: list[list[int]] = [[]]
        self._num_added = 0
        #: How many operations of each kind agreed; what makes them worth comparing beside them.
        self.agreed: Counter[str] = Counter()
        self.met: Counter[str] = Counter()

    def play(self, num_operations: int) -> None:
        """Do so many operations, and a few more to end the last one."""
        while self.agreed.total() < num_operations:
            moves = [self._arrive, self._go_on, self._go_on, self._go_on, self._leave]
            self._chance.choice(moves)()
        self.met["evictions"] = self._ours.num_evictions

    def _arrive(self) -> None:
        if not self._waiting:
            self._add()
        seq_id = self._waiting[0]
        chunk = self._chance.choice([1, self._chance.randint(1, self._longest), self._longest])
        answer = self._do("admit", seq_id, chunk)
        self.met["hits"] += answer["cached"] > 0
        self.met["refused admissions"] += not answer["ok"]
        if answer["ok"]:
            self._running.append(self._waiting.pop(0))

    def _add(self) -> None:
        like = self._chance.choice(self._prompts[-20:])
        tokens = like[: self._chance.randint(0, len(like))]
        tokens += [self._chance.randint(0, 1) for _ in range(self._chance.randint(1, self._most))]
        del tokens[self._longest :]
        self._prompts.append(tokens)
        self._num_added += 1
        seq_id = f"seq-{self._num_added}"
        self._do("add", seq_id, tokens, self._chance.choice([None, None, "salt"]))
        self._waiting.append(seq_id)

    def _go_on(self) -> None:
        if not self._running:
            return
        seq_id = self._chance.choice(self._running)
        seq = self._ours.seqs[seq_id]
        if not seq.num_uncomputed_tokens:
            if seq.num_tokens == self._longest:
                self._end(seq_id)
                return
            self._do("append", seq_id, self._chance.randint(0, 1))
        count = self._chance.randint(1, seq.num_uncomputed_tokens)
        if self._do("advance", seq_id, count)["ok"]:
            return
        self.met["refused growth"] += 1
        self._yield(self._chance.choice(self._running))

    def _leave(self) -> None:
        if not self._running:
            return
        seq_id = self._chance.choice(self._running)
        if self._chance.random() < 0.3:
            self._yield(seq_id)
        else:
            self._end(seq_id)

    def _yield(self, seq_id: str) -> None:
        self._running.remove(seq_id)
        self._do("preempt", seq_id)
        self._waiting.append(seq_id)

    def _end(self, seq_id: str) -> None:
        self._running.remove(seq_id)
        self._prompts.append(self._ours.seqs[seq_id].token_slice(0, self._longest))
        self._do("finish", seq_id)

    def _do(self, name: str, *arguments: Any) -> Answer:
        ours, theirs = getattr(self._ours, name)(*arguments), self._vllm.ask(name, *arguments)
        place = f"operation {self.agreed.total() + 1}: {name}{arguments}"
        assert ours == theirs, f"{place}: ours {ours}, vLLM {theirs}"
        self.agreed[name] += 1
        return ours  # type: ignore[no-any-return]
