"""What `make dist` builds for a release: wheel, sdist, chart, bill of materials of the image, checksums.

The version of all of them is `project.version` in pyproject.toml.
"""
