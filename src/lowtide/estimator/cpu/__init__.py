"""Scratch memory that CPU operators allocate."""
