"""Removing the mean of the output embeddings of a finished model without changing its probabilities.

Softmax does not see a vector that is subtracted from every row of the head. `finished_model.py` says what is needed of
a model, `hub_model.py` and `run_model.py` open and write the two kinds, `probability_check.py` compares the models,
and `recentre_model.py` puts them together: `coupled-adam recentre`.
"""
