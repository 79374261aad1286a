"""Assign documents to splits by a hash of their content and a seed.

The split of a document does not depend on the order of the documents or the number of processes, and does not change
when others are added. Equal documents are always in the same split.
"""

import hashlib
from dataclasses import dataclass

from coupled_adam.base.errors import UserError


@dataclass(frozen=True)
class Fractions:
    """Fractions of the documents for validation and test; the rest is for training."""

    val: float
    test: float
    seed: int = 0
    """Selects the held-out documents."""

    def __post_init__(self) -> None:
        for name, value in (("val", self.val), ("test", self.test)):
            if not 0 <= value < 1:
                raise UserError(f"the fraction {name} is {value}, expected a number in [0, 1)")
        if self.val + self.test >= 1:
            raise UserError(f"the fractions val {self.val} and test {self.test} leave nothing for training")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed}, expected 0 to 2^64 - 1")

    def split_of(self, content: bytes) -> str:
        """The split of a document.

        Example:
            >>> fractions = Fractions(val=0.3, test=0.2)
            >>> [fractions.split_of(content) for content in (b"one", b"two", b"three", b"four", b"five")]
            ['train', 'test', 'train', 'val', 'val']
        """
        salt = self.seed.to_bytes(16, "little")
        digest = hashlib.blake2b(content, digest_size=8, salt=salt).digest()
        place = int.from_bytes(digest, "little") / 2**64
        if place < self.test:
            return "test"
        return "val" if place < self.test + self.val else "train"
