"""Datasets of the Hugging Face hub, read as a stream: nothing is stored but the tokens, and no code of theirs is run.

The commit of the dataset is remembered, so that a preparation that goes on later reads the same documents.
"""

import logging
from collections.abc import Iterator
from typing import Any

from coupled_adam.base.errors import UserConnectionError, UserError
from coupled_adam.base.extras import require
from coupled_adam.data.sources import Piece, Position

DATASETS = {"openwebtext": "hf:Skylion007/openwebtext", "slimpajama": "hf:cerebras/SlimPajama-627B"}
# The hub converts datasets that come as a program into files, in this branch.
CONVERTED = "refs/convert/parquet"
PATIENCE_SECONDS = 10.0


class HubDataset:
    """One split of a dataset.

    Args:
        spec: "openwebtext", "slimpajama" or "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]"; the split is "train" unless said.
        field: the column of the text where `spec` names none.
        found: what `found` gave when a preparation began that goes on now; None for the newest commit.
    """

    def __init__(self, spec: str, field: str, found: dict[str, Any] | None) -> None:
        parts = DATASETS.get(spec, spec).removeprefix("hf:").split(":")
        name, config, split, column = [*parts, "", "", ""][:4]
        if len(parts) > 4 or not name:
            raise UserError(f"source {spec!r}: expected hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], such as hf:allenai/c4:en")
        self.spec = spec
        self.column = column or field
        self._datasets = require("datasets", "hf", f"to read {spec}")
        self._datasets.disable_progress_bars()  # there is one for the whole preparation
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        wanted = found or {"revision": None}
        self._found = {"revision": commit_of(spec, name, wanted["revision"])}
        self._dataset = self._open(name, config or None, split or "train")
        known = (self._dataset.info.splits or {}).get(split or "train")
        self._total: int | None = known.num_examples if known is not None else None
        self._given = 0

    def found(self) -> dict[str, Any]:
        return self._found

    def default_fraction(self) -> float:
        return 0.005

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        self._given = skipped = 0
        if position is not None and position["datasets"] == self._datasets.__version__:
            self._dataset.load_state_dict(position["state"])
            self._given = position["documents"]
        elif position is not None:  # another version may not understand the state; to count is slower
            skipped = position["documents"]
        documents = iter(self._dataset)
        while True:
            try:
                document = next(documents)
            except StopIteration:
                return
            except Exception as error:  # of the network, of the file system or of a decoder: one of many classes
                raise UserConnectionError(
                    f"{self.spec}: reading stopped after {self._given} documents ({_reason(error)}); what is done is "
                    "kept, run the same command again and it goes on"
                ) from error
            self._given += 1
            if self._given <= skipped:
                continue
            if self.column not in document:
                raise UserError(
                    f"{self.spec}: no column {self.column!r} (it has: {', '.join(document)}); name the one "
                    "that has the text with --field"
                )
            if document[self.column]:
                yield Piece(str(document[self.column]))

    def position(self) -> Position:
        return {
            "documents": self._given,
            "datasets": self._datasets.__version__,
            "state": self._dataset.state_dict(),
        }

    def progress(self) -> float | None:
        return min(self._given / self._total, 1.0) if self._total else None

    def _open(self, name: str, config: str | None, split: str) -> Any:
        options = {"name": config, "split": split, "streaming": True}
        try:
            try:
                return self._datasets.load_dataset(name, revision=self._found["revision"], **options)
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                self._found = {"revision": commit_of(self.spec, name, CONVERTED)}
                return self._datasets.load_dataset(name, revision=self._found["revision"], **options)
        except Exception as error:  # of the library, of the network or of the file format: one of many classes
            raise UserError(f"source {self.spec!r}: it cannot be opened ({_reason(error)})") from error


def commit_of(spec: str, name: str, revision: str | None) -> str:
    """The commit that a branch stands for; asks once, where `datasets` would try for minutes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        commit = HfApi().dataset_info(name, revision=revision, timeout=PATIENCE_SECONDS).sha
    except GatedRepoError:
        raise UserError(
            f"source {spec!r}: its owners ask for consent; give it on the page of the dataset, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"source {spec!r}: the Hugging Face hub has no dataset {name!r} that you may read") from None
    except HfHubHTTPError as error:
        raise UserError(f"source {spec!r}: the Hugging Face hub refuses ({_reason(error)})") from error
    except Exception as error:  # of the HTTP library, which changes with the version of huggingface_hub
        raise UserConnectionError(
            f"source {spec!r}: the Hugging Face hub cannot be reached ({_reason(error)}); go online, or give "
            "files that you have with text:FILES"
        ) from error
    return commit or revision or "main"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
