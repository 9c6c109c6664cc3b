-- calls, version 5: several calls on one model, carried out in order as if each came alone.
--
-- KEYS     see book.lua
-- ARGV[1]  {name}: admit, transfer, resize or settle; ARGV[2] is its record, and so on in pairs
--
-- Returns what each returns, in order; an error stands in its place. The book and the accounts
-- are read and written once, and only the functions that are called for are made.
--
-- What a call changed until it failed is saved with the rest. So calls write first and count then:
-- without memory a server refuses a script's first write, and none after one that it took.

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
