"""Changes to Transformers, TRL and Lightning in the processes of a run's program: resume and output folders.

Each Python that the program starts imports `python_path/sitecustomize.py`, since its folder is on PYTHONPATH.
So the user's script needs no change. This room imports only the standard library.
"""
