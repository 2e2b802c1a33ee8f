"""Files that lie in a bucket or on the Hugging Face Hub, fetched once into a cache folder of this machine.

`node_cache` is what other rooms use; recipes decide which files they need. Only `hub` knows huggingface_hub.
"""
