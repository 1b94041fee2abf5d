"""Speed of mechanisms beside their peers: times, launches, memory, floors. `regard bench` is its command."""
