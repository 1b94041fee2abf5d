"""Operations behind the cores: tile, linear and delta attention with their backends, and everything else that computes."""
