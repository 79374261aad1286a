"""The paper's decoders, GPT-2 and Llama-style, with a loss that never holds all logits in memory.

The models do not handle devices, precision or sharding; the trainer applies all three.
"""
