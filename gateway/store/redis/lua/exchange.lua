-- exchange, version 1: publishes one replica's record of one model and returns other replicas'.
--
-- KEYS[1]  hash of the model: field "rev" -> the newest revision; field "r:REPLICA" ->
--          "SEQUENCE REVISION RECORD". A revision is the server's time of writing in
--          microseconds, made strictly increasing.
-- ARGV[1]  replica, no blanks
-- ARGV[2]  sequence: number of this exchange, counted by the replica; a record whose number is
--          not above the stored one changes nothing
-- ARGV[3]  record, opaque; empty: only read
-- ARGV[4]  revision last read; only newer records are returned
-- ARGV[5]  seconds without a write after which another replica's record is dropped
-- ARGV[6]  seconds after the last exchange until the model's key expires
--
-- Returns {newest revision, own stored sequence (0: none), age in ms, record, age in ms, ...}.
-- Only a replica that published before drops others' records, because it has read them.

local key, field = KEYS[1], 'r:' .. ARGV[1]
local sequence, record = tonumber(ARGV[2]), ARGV[3]
local since, silent_s, ttl_s = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if not (sequence and since and silent_s and ttl_s) or #ARGV ~= 6 then
  return redis.error_reply('ERR exchange: bad arguments')
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local revision = tonumber(redis.call('HGET', key, 'rev') or '0') or 0
local own = redis.call('HGET', key, field)
local held = own and tonumber(string.match(own, '^(%d+) ')) or 0

local heard, silent = {}, {}
if revision ~= since then
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'r:' and all[i] ~= field then
      local _, written, kept = string.match(all[i + 1], '^(%d+) (%d+) (.*)$')
      written = tonumber(written)
      if not written or now - written > silent_s * 1000000 then
        silent[#silent + 1] = all[i]
      end
      if written and written > since then
        heard[#heard + 1] = string.format('%d', math.max(0, (now - written) / 1000))
        heard[#heard + 1] = kept
      end
    end
  end
end

if record ~= '' and sequence > held then
  revision = math.max(revision + 1, now)
  redis.call('HSET', key, field, string.format('%.0f %.0f ', sequence, revision) .. record,
    'rev', string.format('%.0f', revision))
  if held > 0 then
    for _, name in ipairs(silent) do redis.call('HDEL', key, name) end
  end
  held = sequence
end
redis.call('EXPIRE', key, ttl_s)

local reply = {string.format('%.0f', revision), string.format('%.0f', held)}
for i = 1, #heard do reply[i + 2] = heard[i] end
return reply
