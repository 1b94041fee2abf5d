"""Writes what `regard list` shows, src/regard/cli/mechanisms.json, from the catalogue.

python docs/make_list.py
"""

from regard.cli.mechanism_table import TABLE, write_mechanisms

if __name__ == "__main__":
    write_mechanisms()
    print(TABLE)
