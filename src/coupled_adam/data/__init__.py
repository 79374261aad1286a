"""Text -> tokens -> shards on disk -> batches. Importing this loads neither torch nor the tokenizers."""
