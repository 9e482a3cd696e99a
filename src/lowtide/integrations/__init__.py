"""Callbacks for the training loops of other packages, which are needed only where their file is imported."""
