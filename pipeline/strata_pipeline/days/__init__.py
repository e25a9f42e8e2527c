"""Figures of single days, small enough to keep, that are added up for weeks and years."""
