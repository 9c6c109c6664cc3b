-- calls, version 7: executes several calls on one model in order, as if each came alone.
--
-- KEYS     see book.lua
-- ARGV[1]  {name}: admit, transfer, resize or settle; ARGV[2] is its record, and so on in pairs
--
-- Returns the calls' results in order, with an error in place of a failed call's. The book and the
-- accounts are read and written once. Only the functions needed are made.
--
-- The changes of a call that fails half way are saved with the rest. So calls write first and
-- count afterwards: a server out of memory refuses a script's first write, but none after it.

local failed = load_book()
if failed then return failed end
local made_checks
local function checks()
  made_checks = made_checks or make_checks()
  return made_checks
end

local made, replies = {}, {}
for i = 1, #ARGV - 1, 2 do
  local name = ARGV[i]
  if not made[name] then
    -- MAKE
  end
  local done, reply = pcall(made[name], unpacked(ARGV[i + 1]))
  replies[#replies + 1] = done and reply or redis.error_reply('ERR ' .. tostring(reply))
end
save()
return replies
