"""Decoders as the paper trains them, GPT-2 and Llama-style, with a head whose loss never holds all logits.

Nothing here knows of devices, precision or sharding; all three are applied from outside.
"""
