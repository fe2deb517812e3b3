"""What people do with a distributed module, tried with autotp and with FSDP2: `rows` and `state` say what, `side` how."""
