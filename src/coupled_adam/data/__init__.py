"""Text -> tokens -> shards on disk -> batches. Importing this package loads neither torch nor tokenizer libraries."""
