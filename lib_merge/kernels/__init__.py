"""Pure functions on tensors: merge methods, randomness, measures, and the registry that describes the methods.

No file is touched here and no tensor name means anything here.
"""
