"""The tasks that the tab offers, one file each: the models and options of one kind of recipe, as data.

Nothing here draws, and nothing here runs.
"""
