"""Run an unedited training script in this process: detect, rehearse and plan its steps."""
