"""What everyone agrees on: names, shapes and pure rules. No I/O beyond reading the catalog file, no Temporal."""
