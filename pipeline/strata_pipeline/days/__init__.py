"""Figures of single days, small enough to keep, from which those of weeks and years are added up."""
