"""What a model's training gains from more ranks: recorded steps, a cost model of the all-reduce, published figures.

Nothing here imports torch except `record` and `calibrate`, which measure.
"""
