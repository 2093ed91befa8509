"""Reading and writing other tools' configuration files."""
