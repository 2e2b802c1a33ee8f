"""Importing this module keeps the user's files from replacing modules that are imported after it."""

from __future__ import annotations

from trainyard_trainer.run_files.programs.start import forget_user_folders

forget_user_folders()
