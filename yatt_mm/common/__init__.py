"""Small parts that several packages use: errors, checkpoints on disk, calls to Ray actors, folders that end with a run.

May import: dataplane.client, dataplane.core, dataplane.media, models.recipes.
"""
