"""Measures of one embedding matrix. Knows nothing of training; needs torch and numpy only, the rest when it is used."""

from coupled_adam.embeddings.download import fetch_word_pairs
from coupled_adam.embeddings.measure import measure
from coupled_adam.embeddings.metrics import EmbeddingMetrics
from coupled_adam.embeddings.single_tokens import SingleTokens, open_tokenizer
from coupled_adam.embeddings.unigram import count_unigram, count_unigram_text, load_unigram
from coupled_adam.embeddings.word_pairs import WordPairs, load_word_pairs
from coupled_adam.embeddings.word_similarity import WordSimilarity

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
