"""torch's FSDP2 (`fully_shard`): fp32 sharded parameters, 16-bit gathers, gradients reduced in fp32."""
