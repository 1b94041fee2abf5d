"""Draws every pattern and every mechanism into docs/gallery.png.

python docs/make_gallery.py
"""

from pathlib import Path

from regard.plots.gallery import sheet

if __name__ == "__main__":
    out = Path(__file__).with_name("gallery.png")
    sheet().savefig(out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")
