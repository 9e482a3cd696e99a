"""Callbacks for other packages' training loops. Each package is needed only when its file here is imported."""
