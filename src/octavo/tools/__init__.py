"""Tools that stand on the engine; the engine never imports them."""
