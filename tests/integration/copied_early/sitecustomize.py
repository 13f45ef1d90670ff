"""Has the GPUs of every server with this folder on its path copy small tensors ahead, too: emulated ones are slow."""

from bngrad_server.memory import ahead

ahead.COPIED_NBYTES = 256 * 1024
