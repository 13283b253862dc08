"""The decoder for which ``smddp tune`` states a step time, and whose steps ``--check`` runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepspeed_smddp.errors import SmddpConfigError


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder whose feed-forward network is four times as wide, without tied weights."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 256
    sequence: int = 64

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(sum(module) for module in self.modules())

    def modules(self) -> list[list[int]]:
        """Elements of the parameters of each module, in the order of the forward pass."""
        h, norm = self.hidden, [self.hidden, self.hidden]
        block = [norm, [3 * h * h, 3 * h], [h * h, h], norm, [4 * h * h, 4 * h], [4 * h * h, h]]
        ends = [self.vocabulary * h]
        return [ends, *(block * self.layers), norm, ends]


def of_text(text: str) -> DecoderSizes:
    """``layers=8,hidden=1024``; sizes that are not named have their defaults.

    Raises:
        SmddpConfigError: a name is not known, or a value is no number that it may hold.
    """
    names = [field.name for field in fields(DecoderSizes)]
    given: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in names or not value.isdecimal() or not 0 < int(value) < 1 << 31:
            raise SmddpConfigError(
                f"--model has {part!r}; it may have {', '.join(f'{n}=NUMBER' for n in names)}"
            )
        given[name] = int(value)
    sizes = DecoderSizes(**given)
    if sizes.hidden % sizes.heads:
        raise SmddpConfigError(
            f"--model: {sizes.heads} heads do not divide a hidden size of {sizes.hidden}"
        )
    return sizes
