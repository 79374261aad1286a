"""Measures of one embedding matrix. Independent of training; needs only torch and numpy, other packages on use."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "EmbeddingMetrics",
    "SingleTokens",
    "WordPairs",
    "WordSimilarity",
    "count_unigram",
    "count_unigram_text",
    "fetch_word_pairs",
    "load_unigram",
    "load_word_pairs",
    "measure",
    "open_tokenizer",
]

# Public names are imported on first use (PEP 562), so that reading word pairs or opening a tokenizer does not load
# torch. No module here may have one of these names, because it would shadow the function.
if TYPE_CHECKING:
    from coupled_adam.embeddings.download import fetch_word_pairs
    from coupled_adam.embeddings.embedding_measures import measure
    from coupled_adam.embeddings.embedding_metrics import EmbeddingMetrics
    from coupled_adam.embeddings.unigram import count_unigram, count_unigram_text, load_unigram
    from coupled_adam.embeddings.word_pairs import WordPairs, load_word_pairs
    from coupled_adam.embeddings.word_similarity import WordSimilarity
    from coupled_adam.tokenizer import SingleTokens, open_tokenizer
else:
    _MODULES = {
        "embeddings.download": ("fetch_word_pairs",),
        "embeddings.embedding_measures": ("measure",),
        "embeddings.embedding_metrics": ("EmbeddingMetrics",),
        "embeddings.unigram": ("count_unigram", "count_unigram_text", "load_unigram"),
        "embeddings.word_pairs": ("WordPairs", "load_word_pairs"),
        "embeddings.word_similarity": ("WordSimilarity",),
        "tokenizer": ("SingleTokens", "open_tokenizer"),
    }

    def __getattr__(name: str) -> object:
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"coupled_adam.{module}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
