"""Plans and simulates architectures of several libraries, and compares them with one device."""
