"""Where a lake lies: on a disk, or in a bucket of an object store.

records    small files, each written once and as a whole: manifests, summaries, records of erasures
schemes    which of the two a place names
objects    a bucket, and the part of it that belongs to a lake
shelves    how a task gets the files of a batch
"""
