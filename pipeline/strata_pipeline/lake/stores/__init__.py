"""Where a lake lies: on a disk, or in a bucket of an object store.

records    small files, each written once and whole: manifests, summaries, records of erasures
schemes    which of the two, by the name of the place
objects    a bucket, and the part of it that is a lake's
shelves    how a task gets the files of a batch
"""
