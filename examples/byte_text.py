"""Text as bytes: reads it, splits it, and cuts the windows that each step trains on."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT_EVERY = 10  # one file in ten is held out; of a single file, its last tenth
SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}


class DataError(ValueError):
    """The text can't be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class ByteText:
    train: torch.Tensor  # uint8, one dimension
    held_out: torch.Tensor  # uint8, one dimension
    source: str
    digest: str  # a resumed run compares it with the checkpoint's

    def unigram_entropy(self) -> float:
        """Entropy of the byte frequencies, in nats: the loss of a model that ignores context."""
        counts = torch.bincount(self.train.long(), minlength=256).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())


def load(data: Path | None, limit: int, window: int) -> ByteText:
    """Read up to `limit` bytes of text; the default is the sources of Python's standard library.

    Raises DataError if either part of the split is shorter than `window` bytes.
    """
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [p for p in sorted(root.rglob("*.py")) if not _skipped(p.relative_to(root))]
        source = "the sources of Python's standard library"
        if not files:
            raise DataError(f"{root} has no Python sources; name a text with --data PATH.")
    elif data.is_dir():
        files = [
            p
            for p in sorted(data.rglob("*"))
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(data).parts)
        ]
        source = str(data)
        if not files:
            raise DataError(f"--data {data} is a directory without files.")
    elif data.is_file():
        files, source = [data], str(data)
    else:
        raise DataError(f"--data {data} does not exist.")

    texts: list[bytes] = []
    room = limit
    for path in files:
        if room <= 0:
            break
        try:
            with path.open("rb") as f:
                text = f.read(room)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}.") from error
        if text:
            texts.append(text)
            room -= len(text)

    if len(texts) >= HELD_OUT_EVERY:
        held_out = b"".join(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        train = b"".join(t for i, t in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
    else:
        whole = b"".join(texts)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        train, held_out = whole[:cut], whole[cut:]

    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) < window:
            raise DataError(
                f"The {name} part of {source} has {len(part)} bytes, fewer than the {window} "
                "of one window; use more text or a smaller --seq-len."
            )
    return ByteText(
        train=_tensor(train),
        held_out=_tensor(held_out),
        source=source,
        digest=hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16],
    )


def training_batch(
    text: ByteText, seed: int, step: int, count: int, first: int, window: int, total: int
) -> torch.Tensor:
    """Windows [first, first + count) of the `total` of one step, as int64 [count, window].

    They depend only on (seed, step), so that a resumed run, or a run with the same total over
    another number of ranks, trains on the same data.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(text.train) - window + 1, (total,), generator=generator)
    return _windows(text.train, starts[first : first + count], window)


def held_out_batches(
    text: ByteText, batches: int, count: int, rank: int, world: int, window: int
) -> list[torch.Tensor]:
    """This rank's part of batches * count * world windows, spread over the held-out text."""
    total = batches * count * world
    starts = torch.linspace(0, len(text.held_out) - window, total).long()[rank::world]
    return [_windows(text.held_out, part, window) for part in starts.split(count)]


def _windows(text: torch.Tensor, starts: torch.Tensor, window: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(window)].long()


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _skipped(path: Path) -> bool:
    return any(part in SKIPPED_DIRECTORIES or part.startswith("config-") for part in path.parts)
