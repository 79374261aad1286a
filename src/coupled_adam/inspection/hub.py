"""Models on the Hugging Face hub: fetches the files that are asked for, and no others."""

import re
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import install_command

# "org/name"; or the name alone, as gpt2 and bert-base-uncased have it, which has no dot.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w-]*")


def fetch_from_hub(name: str, file: str) -> Path | None:
    """The file of the hub model `name` in the local cache, downloaded if need be; None if it has none."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder; if it is a model on the Hugging Face hub: {install_command('hf')}"
        ) from None
    if not _hub_answers(name, file):
        # The path of an earlier download, a mark that the model has no such file, or None: never asked.
        cached = try_to_load_from_cache(name, file)
        if cached is None:
            raise UserError(
                f"{name}: no such file or folder, and the Hugging Face hub cannot be reached for {file!r}; "
                "go online, or download the model elsewhere and give its folder"
            )
        return Path(cached) if isinstance(cached, str) else None
    try:
        return Path(hf_hub_download(name, file))
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(
            f"{name}: no such file or folder, and no model on the Hugging Face hub that you may read ({reason})"
        ) from None


def _hub_answers(name: str, file: str) -> bool:
    """Ask once; `hf_hub_download` would try for half a minute, and say so each time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except (EntryNotFoundError, HfHubHTTPError):
        return True  # no is an answer
    except Exception:  # of the HTTP library, which changes with the version of huggingface_hub
        return False
    return True
