"""What a config or a model may ask for beside ZeRO; :mod:`.attached` lists what an engine puts on its model."""
