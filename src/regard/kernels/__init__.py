"""How things are computed: tiles, chunks and fused kernels behind the cores' push, read and scan. Only cores import this."""
