-- evicted, version 7: a replica's leases that other replicas evicted; each is returned once.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner}
--
-- Returns lease ids.

local members = call('ZRANGEBYLEX', EVICTIONS, '[' .. arg.owner .. '\0', '(' .. arg.owner .. '\1')
local ids = {}
for i, member in ipairs(members) do
  ids[i] = string.sub(member, #arg.owner + 2)
  call('ZREM', EVICTIONS, member)
end
return ids
