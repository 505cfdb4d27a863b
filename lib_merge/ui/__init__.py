"""The Merge tab: forms, cards and pages, the same in every host and standalone.

Nothing here computes on tensors or decides what a merge does.
"""
