-- budget, version 7: reads limits' counters, and adds to one of them for its window.
--
-- KEYS     see book.lua
-- ARGV[1]  {asked, added}: limits as limits.lua takes them; added to the first one, or 0
--
-- Returns msgpack: a LimitView (gateway/records/limit.py) of each.

local known, seen = limits().read(arg.asked), {}
if arg.added ~= 0 then limits().more().add(known, 1, arg.added) end
for i in ipairs(known.limits) do seen[i] = limits().more().view(known, i) end
return pack(seen)
