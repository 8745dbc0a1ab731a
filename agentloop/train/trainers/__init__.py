"""Trainers, one file each, and the steps that they take."""
