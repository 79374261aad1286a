"""`coupled-adam data prepare`, `data info` and `data count`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coupled_adam.base.progress import progress_bar, warnings_as_notes
from coupled_adam.base.text import fixed, parse_tokens, printable, size_text
from coupled_adam.commands.refusal import refuse, user_errors
from coupled_adam.commands.tidy_help import TidyGroup

if TYPE_CHECKING:
    from coupled_adam.data.preparation import Progress

app = typer.Typer(
    cls=TidyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Turn text into token shards and inspect them.",
)


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="`python-docs` (built in), `openwebtext`, `slimpajama`, `hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]`, "
            "`text:FILES` (.txt, .jsonl, .parquet, also .gz, .xz, .zst) or `tokens:FILES` (.bin, .u16.xz). FILES is a "
            "file, a folder or a pattern in quotes.",
        ),
    ] = "python-docs",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write.  [default: data/SOURCE-TOKENIZER]")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="`gpt2` (tiktoken), the path of a tokenizer.json, or `bpe:N` to train one with N tokens.  "
            "[default: bpe:4096 for python-docs, otherwise gpt2]",
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Text field of .jsonl, .parquet and hub datasets.")
    ] = "text",
    separator: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Special token that ends every document, such as `</s>`.")
    ] = None,
    val: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="PART",
            help="Fraction of documents held out for validation.  [default: 0.05 for small sources, 0.005 for large]",
        ),
    ] = None,
    test: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="PART", help="Fraction of documents held out for testing.  [default: same as --val]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed for choosing the held-out documents.")] = 0,
    shard_tokens: Annotated[str, typer.Option(metavar="N", help="Maximum number of tokens per file.")] = "100M",
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Stop after about N tokens, such as `10B`.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of tokenizer processes.  [default: one per core]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared with other settings.")] = False,
) -> None:
    """Turn text into token shards, split into train, val and test by document.

    Run the same command again to resume after an interruption. The result is the same, byte for byte, for any number
    of processes.

    Try: `coupled-adam data prepare`, `coupled-adam data prepare 'text:books/*.txt' --tokenizer bpe:8192`
    """
    from coupled_adam.data.manifest import MANIFEST_FILE
    from coupled_adam.data.prepare import prepare as run
    from coupled_adam.data.settings import default_folder, default_tokenizer

    tokenizer = tokenizer or default_tokenizer(source)
    folder = out or default_folder(source, tokenizer)
    was_complete = (folder / MANIFEST_FILE).is_file() and not overwrite
    with user_errors(), warnings_as_notes(), preparation_bar() as on_progress:
        corpus = run(
            source,
            tokenizer,
            folder,
            field=field,
            separator=separator,
            val=val,
            test=test,
            seed=seed,
            shard_tokens=_tokens("--shard-tokens", shard_tokens),
            max_tokens=None if max_tokens is None else _tokens("--max-tokens", max_tokens),
            processes=processes,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    if was_complete:
        typer.echo(f"Nothing to do: {folder} is complete and was prepared with these settings.")
        return
    splits = ", ".join(f"{name} {corpus.manifest.splits[name].tokens:,}" for name in corpus.splits)
    typer.echo(f"Tokens: {splits}. Vocabulary: {corpus.vocabulary_size:,}. Folder: {folder}")


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder written by `data prepare` or nanoGPT.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all shards and check their SHA-256 sums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the contents of a folder of token shards.

    Try: `coupled-adam data info data/python-docs-bpe4096`
    """
    from coupled_adam.data.corpus import open_corpus
    from coupled_adam.data.corpus_summary import describe

    with user_errors(), warnings_as_notes():
        corpus = open_corpus(folder)
        if verify:
            corpus.verify()
        facts = describe(corpus) | {"verified": verify}
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    else:
        _print_info(Console(highlight=False), facts)


@app.command()
def count(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH", help="Prepared folder, .bin or .u16.xz files, or folders of such files.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write the counts to, such as unigram.npy.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split to count in a prepared folder.")] = "train",
    vocabulary_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Vocabulary size of the tokenizer, for loose files.")
    ] = 50257,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Count how often each token occurs.

    `inspect --unigram` reads these unigram counts.

    Try: `coupled-adam data count data/python-docs-bpe4096`, `coupled-adam data count train.bin --out unigram.npy`
    """
    import numpy as np

    from coupled_adam.base.files import replacing, require_writable
    from coupled_adam.data.corpus import is_corpus, open_corpus
    from coupled_adam.data.corpus_summary import entropy, most_frequent
    from coupled_adam.embeddings.unigram import count_unigram

    with user_errors(), warnings_as_notes():
        if out is not None:
            require_writable(out)
        tokenizer: Path | str | None = None
        if len(paths) == 1 and is_corpus(paths[0]):
            corpus = open_corpus(paths[0])
            counts = count_unigram(corpus.tokens(split).paths, corpus.vocabulary_size, dtype=corpus.manifest.dtype)
            tokenizer = corpus.tokenizer_spec
        else:
            counts = count_unigram(paths, vocabulary_size)
        frequent = most_frequent(counts, tokenizer)
        if out is not None:
            with replacing(out) as temporary, temporary.open("wb") as file:
                np.save(file, counts)
    facts: dict[str, Any] = {
        "tokens": int(counts.sum()),
        "vocabulary_size": len(counts),
        "unseen": int((counts == 0).sum()),
        "entropy": entropy(counts),
        "most_frequent": [vars(token) for token in frequent],
        "out": None if out is None else str(out),
    }
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    else:
        _print_counts(Console(highlight=False), facts)


def _print_info(console: Console, facts: dict[str, Any]) -> None:
    splits = facts["splits"]
    table = Table("split")
    for name in splits:
        table.add_column(name, justify="right")
    for label in ("tokens", "documents", "shards"):
        table.add_row(label, *(_number(split[label]) for split in splits.values()))
    table.add_row("size", *(size_text(split["bytes"]) for split in splits.values()))
    for label, value in (
        ("folder", facts["folder"]),
        ("source", facts["source"] or "unknown"),
        ("tokenizer", facts["tokenizer"] or "unknown"),
        ("vocabulary", f"{facts['vocabulary_size']:,} tokens as {facts['dtype']}"),
        ("separator", "unknown" if facts["separator"] is None else facts["separator"]),
        ("fingerprint", facts["fingerprint"]),
    ):
        console.print(Text(f"{label:12} {printable(str(value))}"), soft_wrap=True)
    console.print(table)
    _print_frequent(console, facts["most_frequent"])
    if facts["verified"]:
        console.print("All shards match the manifest.")


def _print_counts(console: Console, facts: dict[str, Any]) -> None:
    console.print(
        f"{facts['tokens']:,} tokens; {facts['vocabulary_size'] - facts['unseen']:,} of the "
        f"{facts['vocabulary_size']:,} in the vocabulary occur. Their entropy is {fixed(facts['entropy'], 3)} nats, "
        "the loss of a model that knows only token frequencies.",
        soft_wrap=True,
    )
    _print_frequent(console, facts["most_frequent"])
    if facts["out"] is not None:
        console.print(Text(f"Counts: {facts['out']}"), soft_wrap=True)


def _print_frequent(console: Console, tokens: list[dict[str, Any]]) -> None:
    table = Table("most frequent", "token")
    table.add_column("count", justify="right")
    for token in tokens:
        table.add_row(Text(token["text"] or "—"), str(token["token"]), f"{token['count']:,}")
    console.print(table)


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _tokens(option: str, text: str) -> int:
    number = parse_tokens(text)
    if not isinstance(number, int) or number < 1:
        refuse(f"{option} is {text!r}; expected a number of tokens such as 300000, 300k or 10B")
    return number


@contextmanager
def preparation_bar() -> "Iterator[Callable[[Progress], None]]":
    """Progress bar for the stages of a preparation, with the time left if it can be estimated."""
    is_tokenizing = False
    with progress_bar() as bar:

        def on_progress(progress: "Progress") -> None:
            nonlocal is_tokenizing
            if progress.stage == "tokenizing" and not is_tokenizing:
                is_tokenizing = True
                if progress.tokens:
                    bar.say(f"Resuming after {progress.tokens:,} tokens.")
            bar.show(progress.stage, progress.done, note=f"{progress.tokens:,} tokens")

        yield on_progress
