"""Remove the mean of a trained model's output embeddings without changing its probabilities: `coupled-adam recentre`.

Subtracting one vector from every row of the head does not change the softmax. `finished_model.py` defines the model
interface, `hub_model.py` and `run_model.py` open and write the two kinds of models, `probability_check.py` compares
models, and `recentre_model.py` runs all steps.
"""
